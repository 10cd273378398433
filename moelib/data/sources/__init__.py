"""Sources of documents: files, tables and data sets, divided into parts."""
