"""What a run did, from its folder: one page to read, and a trace to open in Perfetto."""
