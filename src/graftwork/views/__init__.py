"""Reports: records in, HTML pages, JUnit files and notebook tables out. Knows no stores and no terminal."""
