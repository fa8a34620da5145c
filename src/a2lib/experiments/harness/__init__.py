"""What every section of the report needs to be measured; it names none of them."""
