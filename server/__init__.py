"""The service around the model: the command, the two processes, the HTTP dialects."""
