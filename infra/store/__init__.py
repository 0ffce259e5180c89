"""The workspace: where everything lies in it, its records, and files that are whole or not
there."""
