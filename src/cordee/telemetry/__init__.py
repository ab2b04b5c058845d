"""What processes tell of themselves: streams of events in files. No torch, light imports: every rank loads this."""
