"""Records, tasks and prompt boundaries: everything between a file of questions and token ids."""
