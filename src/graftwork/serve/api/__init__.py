"""The APIs for clients: validate requests, encode answers. No clock, network or model."""
