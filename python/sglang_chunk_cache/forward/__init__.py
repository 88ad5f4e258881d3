"""One forward over rows: which rows it has, how they attend, who looks on, how long it takes."""
