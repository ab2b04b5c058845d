"""The pages of a server: what a browser shows of it, and the requests of people who use one."""
