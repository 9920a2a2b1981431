"""Calls and futures: which thread reads messages, which thread runs functions, and which threads wait."""
