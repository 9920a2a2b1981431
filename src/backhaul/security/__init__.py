"""Decides which peers may connect and what they may do, before their messages are decoded."""
