"""Typed contracts of ds: msgspec structs, codecs and the event stream."""
