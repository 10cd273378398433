"""Conversations: records of several formats, chat templates, and the tokens that are labels."""
