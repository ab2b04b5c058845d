"""A service beside the jobs of a simulated cluster: requests, replicas that come and go, and what it costs."""
