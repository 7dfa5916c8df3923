"""How each API asks and is answered: pure functions between JSON and requests, replies and JSON or events."""
