"""Key-value caches: where variants lie (`store`), room for them (`pool`), how they move (`assembler`), what stays
(`keeper`)."""
