"""Extensions of the server, which the engine does not depend on. The server discovers each package's `EXTENSION`."""
