"""The pure heart: decisions, data order, figures. Standard library and numpy; no clock, file, network, environment."""
