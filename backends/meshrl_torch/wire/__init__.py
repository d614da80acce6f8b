"""How weights travel, for both ends. An engine's process imports it, where there is no meshrl: it needs only torch."""
