"""The parts of `serving_accuracy.py`: memory (`kv`, `paging`) and speed."""
