"""Services: what is declared, which replicas it has, and the controller that makes and ends them."""
