"""Key-value caches: where variants lie (`store`), how they move (`assembler`), which rows attend (`rows`)."""
