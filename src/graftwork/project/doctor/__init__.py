"""`graft doctor`: what the machine, the accounts and the project have of what the work needs."""
