"""`onehead train`: trains a small checkpoint, or an existing checkpoint further."""
