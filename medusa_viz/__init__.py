"""Medusa-Viz: an interactive visual explorer for Medusa decoding."""
