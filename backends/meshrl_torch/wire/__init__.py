"""How weights travel, for both ends. It needs torch and numpy alone: an engine's process imports it without meshrl."""
