"""HTTP: one module for each dialect and what they share. Imports no torch, no model and no engine."""
