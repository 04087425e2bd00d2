"""The model runner: turns a step plan into token ids. Knows no scheduler, no sockets and no text."""
