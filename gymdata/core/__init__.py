"""The pure core: tables and arrays in, tables and arrays out. No I/O, no clock, no logging, no unseeded randomness."""
