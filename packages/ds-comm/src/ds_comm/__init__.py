"""Mesh of process groups, recorded collectives and hang diagnosis."""
