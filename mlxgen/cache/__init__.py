"""Key/value caches that are rewound by length, and a model together with its own."""
