"""Extensions of the server, which no call of an engine needs. Each package has an `EXTENSION`, by which it is found."""
