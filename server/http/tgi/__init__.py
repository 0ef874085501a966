"""TGI's dialect: /generate, /generate_stream, / and /info."""
