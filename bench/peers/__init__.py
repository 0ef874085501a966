"""Programs that run in the environments of other engines, to be measured beside onehead."""
