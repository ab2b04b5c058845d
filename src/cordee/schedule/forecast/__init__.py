"""When jobs will start and end: the same `decide`, run forward over run times."""
