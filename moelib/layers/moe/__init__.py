"""The Mixture-of-Experts layer and its parts."""
