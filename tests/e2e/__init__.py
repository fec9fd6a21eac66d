"""A package, so that what lasts for it (`scope="package"`: browser and app) ends with its last test."""
