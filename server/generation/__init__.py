"""A checked request in, streams of text out: what both HTTP dialects and the commands share. Knows no HTTP."""
