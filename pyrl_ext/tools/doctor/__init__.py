"""`pyrl doctor`: reads what a machine has, and says what that allows."""
