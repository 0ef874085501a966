"""The files under deploy/. `scripts/observability` runs the cases that need Prometheus."""
