"""Problems that reasoning-gym makes: rows of them, and the order in which a curriculum draws."""
