"""The paper's tables, one module each: the runs it needs, and how they become the table."""
