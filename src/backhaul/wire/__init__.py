"""Bytes <-> messages: no sockets, no threads, no clock."""
