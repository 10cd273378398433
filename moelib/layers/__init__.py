"""The building blocks of models, each a module with parameters."""
