"""What people read: summaries of a profile and their drawing on a terminal."""
