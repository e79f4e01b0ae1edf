"""The routes of the server and the pages that it shows."""
