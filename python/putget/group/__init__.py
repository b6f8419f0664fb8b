"""The ranks of a group: how they meet, agree, hear each other, and join their domains by a network."""
