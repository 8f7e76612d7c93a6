"""The plan for people: terminal, explanations, the page of keys, HTML."""
