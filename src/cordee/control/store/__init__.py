"""The log in a database: the schema and its migrations, commits, queries."""
