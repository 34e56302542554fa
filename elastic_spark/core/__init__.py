"""The pure heart: decisions, data order, figures. Standard library and numpy only; no clock, file, network or environment."""
