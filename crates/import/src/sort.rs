//! External sort of fixed-size records inside a memory budget.
