"""SGLang's classes as we change them, one file per class. Importing this package loads nothing."""
