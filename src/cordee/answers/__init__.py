"""Requests and answers of the HTTP API as pydantic models: the API's schema, and the JSON of every verb."""
