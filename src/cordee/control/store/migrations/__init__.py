"""The steps that bring a database to this version's schema; run when the server starts."""
