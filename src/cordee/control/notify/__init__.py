"""Notifications: messages about jobs to webhooks, Slack and e-mail."""
